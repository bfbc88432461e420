/* Chunks of a file that have not changed since an earlier checkpoint are shared with it where the file system can share
 * what holds them on the disk (os/stream.h's even_output_share: XFS with reflink, btrfs); the rest is written. */
#ifndef EVEN_CHECKPOINT_SHARING_H
#define EVEN_CHECKPOINT_SHARING_H

#include "checkpoint/earlier.h"

/* Which: chunk i, where the manifest of the earlier checkpoint gives the same file a chunk i of as many bytes with the
 * same checksum, XXH3 of 64 bits, as the bytes in memory have now. That is the rule by which whole files are linked
 * (earlier.h), asked of each chunk: of two that differ by chance one in 2^64 passes for the same, once in 10^15
 * checkpoints of 70 GB that change everywhere. It is no cryptographic sum: who chooses weights so that two chunks have
 * one sum gets the older for the newer. Same place and same length make the ranges end at the blocks' borders: chunks
 * are 4 MiB; the last, shorter one ends where both files do.
 *
 * What is trusted: the earlier manifest by its own checksum, the earlier file by being there, a file, of its size; its
 * bytes are not read again, as those of a linked file are not. The manifest that is written has the sums of the bytes
 * in memory, so a chunk that the disk has damaged since is inherited, but not in silence: whoever reads either
 * checkpoint finds it, among them what keeps checkpoints, before an older one goes, and then the next one shares
 * nothing (evenstep/checkpoint_shared.py).
 *
 * The power: the kernel has the shared bytes on the disk before it shares them, and what the new file holds is safe by
 * its fsync, like bytes that were written; the folder gets its name after that. The earlier file may lose its name, or
 * be replaced, from its opening on: it stays open. One that was replaced by another of its size after the earlier
 * manifest was read, and before that, is not seen: its bytes are shared in silence, as a damaged one's, and whoever
 * reads the new checkpoint finds it. What holds the bytes lives for as long as one of the files does, and a write to
 * one of them (a disk that is repaired, a user) does not reach the other: less is lost together than with a link. */

typedef struct even_sharing {
  even_content_chunks chunks;
  uint64_t bytes;
} even_sharing;

/* Shares what it can with the earlier file `name`. out->there: which chunks of `content` the new file `output` has by
 * then, NULL: none (nothing was to be shared, or not here); out->bytes are theirs. Whatever goes wrong between the file
 * systems ends the sharing, not the save: what was not shared is to be written, even_content_write_rest. Errors are
 * those of memory and an interruption. Free with even_sharing_free, also after a failure. */
even_status even_sharing_make(const even_earlier *earlier, const char *name, const even_content *content,
                              even_output *output, even_sharing *out) EVEN_MUST_USE;
void even_sharing_free(even_sharing *sharing);

#endif
