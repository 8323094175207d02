"""Neighborhoods on a grid (NATTEN, arXiv 2204.07143): a pixel sees a square of pixels around it.

Positions number the grid row by row; the square is shifted inwards at the borders.
"""

import torch

import attndsl

from picture import compare, weights

PROGRAM = "natten2d(width, height, side, side)"
WIDTH, HEIGHT, SIDE = 16, 8, 5


def main():
    attention = attndsl.compile(PROGRAM, width=WIDTH, height=HEIGHT, side=SIDE)
    seen = weights(attention, WIDTH * HEIGHT)[0] > 0
    for x, y in ((7, 4), (15, 0)):
        print(f"\nwhat the pixel ({x}, {y}) sees")
        grid = seen[y * WIDTH + x].reshape(HEIGHT, WIDTH).tolist()
        for row, cells in enumerate(grid):
            marks = ["#" if cell else "." for cell in cells]
            if row == y:
                marks[x] = "O"
            print("  " + " ".join(marks))

    def first(x, n):
        return torch.clamp(x - SIDE // 2, 0, n - SIDE)

    def near(x, y, n):
        return (y >= first(x, n)) & (y < first(x, n) + SIDE)

    def live(b, h, q, kv):
        return near(q % WIDTH, kv % WIDTH, WIDTH) & near(q // WIDTH, kv // WIDTH, HEIGHT)

    compare(attention, WIDTH * HEIGHT, live=live)


if __name__ == "__main__":
    main()
