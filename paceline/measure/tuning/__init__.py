"""Costs: on paper for any model and machine (plan), and measured on this one."""
