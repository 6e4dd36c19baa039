"""The status of the ranks of a node, in memory that they share: each rank writes its own row and reads all rows.

The leader writes another, longer one: what it has heard of other nodes. Reading needs nothing of the rank that has
written: it may compute, be stopped, or have ended. A row has a length and a checksum before its content, so a row that
is being written is not taken for one that is there. The row also counts the looks of its rank: a leader whose count
stands still passes on nothing of other nodes.
"""

import zlib

import numpy as np

ROW_BYTES, HEAD_BYTES = 4096, 24
FAR_ROWS = 8  # of memory, for what is heard of other nodes
OWN_BYTES, FAR_BYTES = ROW_BYTES - HEAD_BYTES, FAR_ROWS * ROW_BYTES - HEAD_BYTES  # of content, at most


class StatusRows:
    """The rows of one node.

    memory: of shape (ranks + FAR_ROWS, ROW_BYTES), dtype uint8, zero at first. own: the index of this rank.
    """

    def __init__(self, memory: np.ndarray, own: int) -> None:
        self.own, self.far = own, len(memory) - FAR_ROWS  # indices of rows
        self._use(memory)
        self._seen = np.zeros_like(self._heads)

    def _use(self, memory: np.ndarray) -> None:
        self._bytes = memory.reshape(-1)
        heads = memory[: self.far + 1, :HEAD_BYTES].view(np.int64)
        self._heads, self._looks = heads[:, :2], heads[:, 2]  # length and checksum; looks

    def release(self) -> None:
        """Let go of the shared memory; a copy takes its place. Local, from any thread, at any time."""
        self._use(self._bytes.reshape(-1, ROW_BYTES).copy())

    def write(self, content: bytes, far: bool = False) -> None:
        """Set this rank's row, of at most OWN_BYTES. far: the one of other nodes instead, of at most FAR_BYTES."""
        index = self.far if far else self.own
        head = len(content), zlib.crc32(content)
        if tuple(self._heads[index].tolist()) != head:
            self._bytes[self._place(index, len(content))] = np.frombuffer(content, np.uint8)
            self._heads[index] = head

    def count_look(self) -> None:
        """This rank looks."""
        self._looks[self.own] += 1

    def looks(self, index: int) -> int:
        """How often the rank with this index has looked."""
        return int(self._looks[index])

    def changed(self) -> list[tuple[int, bytes]]:
        """The rows that have another content than at the last call: (index, content)."""
        heads = self._heads.copy()
        news = []
        for index in np.flatnonzero((heads != self._seen).any(axis=1)).tolist():
            length, checksum = heads[index].tolist()
            if 0 <= length <= (FAR_BYTES if index == self.far else OWN_BYTES):
                content = self._bytes[self._place(index, length)].tobytes()
                if zlib.crc32(content) == checksum:  # otherwise it is being written, and is read the next time
                    self._seen[index] = heads[index]
                    news.append((index, content))
        return news

    def _place(self, index: int, length: int) -> slice:
        begin = index * ROW_BYTES + HEAD_BYTES
        return slice(begin, begin + length)
