"""A cross-entropy whose classes are the batch's samples (SimCLR, CLIP): on a rank they are those of its share alone."""

from __future__ import annotations

_OFFSETS = (0, -1, -2)  # without a sample itself, or it and its other view
_WORDS = (
    "the loss compares this rank's samples with one another (a cross-entropy over {0} classes for {1} samples, and over {2} for {3} "
    "before), where one device compares those of the whole batch, so parameters become others than there\n  fix: compute it of all "
    "ranks' embeddings, as docs/python-api.md says under Losses of samples against one another"
)


class Among:
    """Remembers the cross-entropies of a rank's first backwards. One with as many classes as samples may be so by chance; two,
    of other numbers of samples, are not."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # by views and offset: classes and samples

    def look(self, shape: tuple[int, ...], samples: int, total: int) -> str:
        """shape: of what a cross-entropy of a backward over so many of the batch's `total` samples is given."""
        if len(shape) != 2:
            return ""
        classes = shape[1]
        for views in (1, 2):
            offset = classes - views * samples
            if offset not in _OFFSETS or shape[0] not in (samples, views * samples):
                continue
            # the whole batch's, gathered, or half of it in two views, which looks alike
            if views * samples in (total, 2 * total):
                continue
            before = self._seen.setdefault((views, offset), (classes, samples))
            if before[1] != samples:
                return _WORDS.format(classes, samples, *before)
        return ""
