"""Worker processes, one file an engine; serve.py is the program, the others are what it loads."""
