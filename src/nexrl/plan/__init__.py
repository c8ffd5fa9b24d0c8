"""What an experiment needs, calculated before it starts: `nexrl plan`, and the trainer's check at start. No torch."""
