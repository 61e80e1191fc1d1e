"""Published benchmark logs: read, audited and shown."""
