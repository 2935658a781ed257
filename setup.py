"""For tools that still look for this file; everything stands in setup.cfg."""

from setuptools import setup

setup()
