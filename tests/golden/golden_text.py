"""Text to train on: the same bytes on every machine."""
import numpy


def write_text(path, size, seed=1):
    """Words that follow one another by a fixed random chain: something to learn, more each step."""
    generator = numpy.random.default_rng(seed)
    words = [bytes(generator.integers(97, 123, generator.integers(2, 10), dtype=numpy.uint8))
             for _ in range(400)]
    followers = generator.integers(0, len(words), (len(words), 6))
    text, word = bytearray(), 0
    while len(text) < size:
        text += words[word] + (b". " if generator.random() < 0.1 else b" ")
        word = followers[word, generator.integers(followers.shape[1])]
    path.write_bytes(bytes(text[:size]))
    return path
