"""The commands of cluster/cli.py that talk to a running system, one module each."""
