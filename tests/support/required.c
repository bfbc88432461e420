#include "support/required.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool required(const char *word, const char *why) {
  const char *words = getenv("EVENSTEP_TEST_REQUIRE");
  size_t length = strlen(word);
  for (const char *at = words; at != NULL; at = strchr(at, ',')) {
    at += *at == ',' ? 1 : 0;
    if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0')) {
      (void)fprintf(stderr, "EVENSTEP_TEST_REQUIRE is %s, but: %s\n", words, why);
      return true;
    }
  }
  return false;
}
