"""torch's attention by attndsl programs: what ``scaled_dot_product_attention`` and modules need."""
