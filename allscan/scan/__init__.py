"""AllScan: the workspace of a scan, its channels and its kernel launches."""
