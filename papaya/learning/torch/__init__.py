"""The torch engine. Importing this package imports torch, which takes seconds."""
