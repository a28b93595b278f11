"""Rewards for words drawn by Pillow: the right word, misspellings, another word, and noise.

    python -m examples.honesty"""
import random, string
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from examples.letters import KEPT_OUT, SIZE, WORDS, compare, draw_letter, read

def draw_squares(word):
    """As the small model of letters.py draws: one letter per square."""
    image = Image.new("RGB", (32 * SIZE, 32), "white")
    for i, letter in enumerate(word.upper()):
        image.paste(draw_letter(letter), (32 * i, 0))
    return image

def draw_line(word):
    """As in print: small letters, close together."""
    image = Image.new("RGB", (32 * SIZE, 32), "white")
    font = ImageFont.load_default(size=28)
    ImageDraw.Draw(image).text((80, 16), word, "black", font, anchor="mm")
    return image

def draw_blurred(word):
    return draw_line(word).filter(ImageFilter.GaussianBlur(4))

def misspell(word, wrong):
    """Replaces this number of letters, at random places."""
    letters = list(word)
    for i in random.sample(range(len(word)), wrong):
        letters[i] = random.choice(string.ascii_lowercase.replace(word[i], ""))
    return "".join(letters)

random.seed(0)
words = WORDS.split() + KEPT_OUT.split()
kinds = {
    "the right word": words,
    "one letter wrong": [misspell(word, 1) for word in words],
    "two letters wrong": [misspell(word, 2) for word in words],
    "another word": words[1:] + words[:1],
    "random letters": [misspell(word, len(word)) for word in words]}
print(f"{'drawn':22} reward, reward of a perfect reader, read as drawn, read as requested")
for draw in (draw_squares, draw_line, draw_blurred):
    print(f"{draw.__name__}: {len(words)} pictures of each kind")
    for kind, drawn in kinds.items():
        rows = []
        for word, text in zip(words, drawn):
            seen = read(draw(text))
            rows.append((compare(word, seen), compare(word, text),
                         compare(text, seen) == 1, compare(word, seen) == 1))
        print(f"    {kind:18}", *[f"{value:.3f}" for value in np.mean(rows, 0)])
noise = np.random.default_rng(0).integers(256, size=(len(words), 32, 32 * SIZE, 3), dtype="uint8")
seen = [read(Image.fromarray(pixels)) for pixels in noise]
rewards = [compare(word, text) for word, text in zip(words, seen)]
print(f"noise: {np.mean(rewards):.3f}, text in {sum(map(bool, seen))} of {len(words)}", seen[:4])
