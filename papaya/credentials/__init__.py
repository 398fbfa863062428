"""Secrets and certificates in files, for servers, devices and commands."""
