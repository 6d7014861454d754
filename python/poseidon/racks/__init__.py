"""Which machines share a rack, found from rates between all of them, and whether adding up by rack pays."""
