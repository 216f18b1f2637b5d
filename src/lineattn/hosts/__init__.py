"""How a method meets a backbone that somebody else wrote; imports torch alone."""
