"""Other libraries' models through the same load, save and export."""
