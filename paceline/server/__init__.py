"""The server: the engine behind OpenAI's HTTP routes. `run.py` puts it together; the engine lives in a
process of its own (worker.py).
"""
