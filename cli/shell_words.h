/* Words as a shell takes them. */
#ifndef EVEN_CLI_SHELL_WORDS_H
#define EVEN_CLI_SHELL_WORDS_H

#include <evenstep/status.h>
#include <stddef.h>

/* Cuts `text` up in place: words lie apart by blanks, '…' and "…" keep them (in the second \" and \\ are signs), and
 * outside of them \ takes the next sign as it is. Nothing is expanded. words[*count] is NULL; `most` words have room,
 * and the NULL. EVEN_ERR_USAGE: more words, or a quote that does not end; words point into `text`. */
even_status even_shell_words_split(char *text, char **words, size_t most, size_t *count) EVEN_MUST_USE;

#endif
