"""Forty small tasks for coding agents, and programs that judge what they write."""
