"""Worker processes, one file a peer; serve.py is the program, the others are what it loads."""
