"""The benchmark: Paceline and its peers, each in a process of its own, on the same prompts (cli/bench.py)."""
