"""What people look at: tables and pictures."""
