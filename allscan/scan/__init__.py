"""AllScan: the memory of a scan, its channels and its launches."""
