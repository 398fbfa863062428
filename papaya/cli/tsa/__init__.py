"""`papaya tsa`: build and measure the TSA binary."""
