"""Training and comparing encodings. Needs the extra `lab`: pip install "whereformer[lab]"."""
