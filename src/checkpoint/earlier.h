/* What a checkpoint that is there already holds, for a new one that may share its files. */
#ifndef EVEN_CHECKPOINT_EARLIER_H
#define EVEN_CHECKPOINT_EARLIER_H

#include "checkpoint/content.h"
#include "checkpoint/manifest_writer.h"
#include "os/stream.h"

typedef struct even_earlier {
  char *folder;
  even_manifest_file *files;
  size_t count;
} even_earlier;

/* Reads the manifest in `folder` (NULL: none); one that cannot be read, or is not right, counts as none: nothing is
 * shared then. Free with even_earlier_free. */
even_status even_earlier_read(const char *folder, even_earlier *out) EVEN_MUST_USE;
void even_earlier_free(even_earlier *earlier);
/* What its manifest says of the file `name`; NULL: there is none. */
const even_manifest_file *even_earlier_find(const even_earlier *earlier, const char *name);
/* Opens that file where it is as its manifest says: a file, no symbolic link, of that size. *opened false: it is not.
 */
even_status even_earlier_open(const even_earlier *earlier, const even_manifest_file *file, even_text *path,
                              even_input *input, bool *opened) EVEN_MUST_USE;

/* Gives the earlier file `name` the further name `path` where `content` is the same by its size and every checksum; of
 * small files never, so that not all of them are lost with one. *entry is what the manifest says of it then, its name
 * apart (sums: free with even_free); *linked is false where it has to be written. */
even_status even_earlier_link(const even_earlier *earlier, const char *name, const even_content *content,
                              const char *path, even_manifest_file *entry, bool *linked) EVEN_MUST_USE;

#endif
