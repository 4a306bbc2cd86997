"""OpenAI's HTTP routes. `run.py` puts the server together; the engine has its own process (worker.py)."""
