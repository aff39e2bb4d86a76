"""Looks at run folders: reads what runs have written, lists, compares and shows them. Imports no JAX."""
