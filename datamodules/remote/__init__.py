"""What lies on other machines: read by URL, and copied to a folder of bounded size."""
