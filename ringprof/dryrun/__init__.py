"""Dry runs: operations and memory of one rank, found by running its strategy on shapes without a device."""
