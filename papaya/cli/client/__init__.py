"""`papaya client`: devices that train for a server."""
