"""Skills from elsewhere: where they come from, what is locked and signed of them, and what is wrong with them."""
