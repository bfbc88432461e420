/* What a snapshot needs of the writer: files whose bytes lie ready in memory. */
#ifndef EVEN_CHECKPOINT_WRITER_H
#define EVEN_CHECKPOINT_WRITER_H

#include "checkpoint/content.h"

/* As even_checkpoint_writer_add, for content of any kind. */
even_status even_checkpoint_writer_add_content(even_checkpoint_writer *writer, const char *name,
                                               const even_content *content) EVEN_MUST_USE;

#endif
