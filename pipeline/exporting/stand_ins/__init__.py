"""Modules that an exported folder holds in place of packages and modules that it does not carry."""
