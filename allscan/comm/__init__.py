"""Communicators: ranks, symmetric heap, exchanges on the host, order of calls."""
