"""Where bytes live: layouts, slots, the plan, and the loader that fills them."""
