"""What one rank does and holds, told by its strategy's own code without a device: it runs on shapes alone."""
