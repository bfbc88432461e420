/* A line of words, as it is typed for a shell. */
#include "cli/shell_words.h"

#include "base/fail.h"

#include <stdbool.h>
#include <string.h>

/* Takes one word from *from to *to, which it never overtakes: how it ended is in *open, a quote or 0. */
static void take_word(char **from, char **to, char *open) {
  char *at = *from;
  char *out = *to;
  char quote = 0;
  for (; *at != '\0' && (quote != 0 || (*at != ' ' && *at != '\t')); at++) {
    bool escapes = *at == '\\' && at[1] != '\0' && (quote == 0 || (quote == '"' && (at[1] == '"' || at[1] == '\\')));
    if (escapes) {
      *out++ = *++at;
    } else if (quote == 0 && (*at == '\'' || *at == '"')) {
      quote = *at;
    } else if (*at == quote) {
      quote = 0;
    } else {
      *out++ = *at;
    }
  }
  *from = at;
  *to = out;
  *open = quote;
}

even_status even_shell_words_split(char *text, char **words, size_t most, size_t *count) {
  char *at = text;
  char open = 0;
  *count = 0;
  words[0] = NULL;
  for (at += strspn(at, " \t"); *at != '\0'; at += strspn(at, " \t")) {
    char *word = at;
    char *end = at;
    if (*count == most) {
      return even_fail(EVEN_ERR_USAGE, "more than %zu words", most);
    }
    take_word(&at, &end, &open);
    if (open != 0) {
      (void)even_fail(EVEN_ERR_USAGE, "a %c has no other one", open);
      return even_error_fix("end what it begins, or write \\%c for the sign itself", open);
    }
    at += *at == '\0' ? 0 : 1;
    *end = '\0';
    words[(*count)++] = word;
    words[*count] = NULL;
  }
  return EVEN_OK;
}
