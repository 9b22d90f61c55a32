"""A hostile processor of a guest: a process of its own that rewrites words of shared memory without pause.

`rewriter.py FILE BYTES WORD...`, each WORD an `offset:width:value,value,...`. The first value is the sound one, which a
word holds most of the time and again at the end; ends when standard input closes.
"""

import mmap
import random
import select
import sys


def main(file: int, size: int, *words: str) -> int:
    memory = memoryview(mmap.mmap(file, size))
    chance = random.Random(7)
    places = []
    for word in words:
        offset, width, values = word.split(":")
        coded = [int(value).to_bytes(int(width), "little") for value in values.split(",")]
        places.append((slice(int(offset), int(offset) + int(width)), coded))
    # A long sequence drawn beforehand, so that the loop itself is as quick as this language has it: words that are
    # wrong for a moment, then all of them anything, then all sound for a while.
    steps = []
    for _ in range(2000):
        for _ in range(4):
            place, coded = chance.choice(places)
            steps += [(place, chance.choice(coded)), (place, coded[0])]
        steps += [(place, chance.choice(coded)) for place, coded in places] * chance.choice((0, 1, 30))
        steps += [(place, coded[0]) for place, coded in places] * chance.choice((1, 1, 30))
    while not select.select([0], [], [], 0)[0]:
        for place, value in steps:
            memory[place] = value
    for place, coded in places:
        memory[place] = coded[0]
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
