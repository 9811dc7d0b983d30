"""Draw docs/images/domains.png, a digit of each class from each domain of domains_digits: ``python docs/images/domains.py``."""

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from fedfleet.datasets import domains_digits
from fedfleet.datasets.files import data_dir

SCALE, GAP, NAMES = 2, 2, 84
data = domains_digits.load(data_dir())
cell = domains_digits.SIDE * SCALE + GAP
sheet = Image.new("RGB", (NAMES + 10 * cell, len(data.domains) * cell), "white")
draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
assert data.train.domain is not None
for row, name in enumerate(data.domains):
    draw.text((4, row * cell + cell // 2), name, fill="black", anchor="lm", font=font)
    for label in range(10):
        first = torch.nonzero((data.train.domain == row) & (data.train.y == label))[0, 0]
        pixels = data.train.x[first].permute(1, 2, 0)
        image = Image.fromarray(pixels.numpy()).resize((SCALE * len(pixels),) * 2, Image.Resampling.NEAREST)
        sheet.paste(image, (NAMES + label * cell, row * cell))
sheet.save(Path(__file__).with_suffix(".png"), optimize=True)
