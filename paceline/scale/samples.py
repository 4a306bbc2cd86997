"""Prometheus texts of several servers as one: every sample gets the label `replica`. Invariant: a family is
described once, and all its samples follow."""

from __future__ import annotations

from collections.abc import Mapping


def joined(texts: Mapping[str, str]) -> str:
    """texts: by replica."""
    families: dict[str, dict[str, list[str]]] = {}  # by name: the lines about it, and its samples
    for replica, text in texts.items():
        family: dict[str, list[str]] = {"about": [], "samples": []}
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], {"about": [], "samples": []})
            if line.startswith("#"):
                if len(family["about"]) < 2:  # HELP and TYPE
                    family["about"].append(line)
                continue
            name, brace, rest = line.partition("{")
            if not brace:
                name, _, value = line.rpartition(" ")
                rest = f"}} {value}"
            comma = "" if rest.startswith("}") else ","
            family["samples"].append(f'{name}{{replica="{replica}"{comma}{rest}')
    lines = [line for each in families.values() for line in (*each["about"], *each["samples"])]
    return "\n".join(lines) + "\n"
