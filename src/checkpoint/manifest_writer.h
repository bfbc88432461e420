/* manifest.json: what belongs to a checkpoint, with a checksum over itself as its last member. */
#ifndef EVEN_CHECKPOINT_MANIFEST_WRITER_H
#define EVEN_CHECKPOINT_MANIFEST_WRITER_H

#include "base/text.h"
#include "checkpoint/parts.h"

#include <stdint.h>

typedef struct even_manifest_file {
  char *name;
  uint64_t bytes;
  uint64_t *sums; /* one a chunk */
  size_t sum_count;
  even_part *parts; /* ascending; may be NULL */
  size_t part_count;
} even_manifest_file;

/* No reader takes a larger one. */
enum { EVEN_MANIFEST_MOST_BYTES = 256 << 20 };

/* The manifest's text. created_ns: since 1970 UTC. state_json: an object. Its last line is
 * EVEN_MANIFEST_TAIL with the XXH3 of all bytes before that line. EVEN_ERR_OVERFLOW: it would have more than
 * EVEN_MANIFEST_MOST_BYTES. */
even_status even_manifest_write(const even_manifest_file *files, size_t count, uint64_t created_ns,
                                const char *state_json, even_text *out) EVEN_MUST_USE;

/* How the text ends; 16 hexadecimal digits stand between the two. */
#define EVEN_MANIFEST_TAIL "\n  \"manifest_checksum\": \""
#define EVEN_MANIFEST_END "\"\n}\n"

#endif
