/* RFC 3629. */
#include "base/utf8.h"

#include <string.h>

static size_t expected_bytes(unsigned char first) {
  if (first < 0x80) {
    return first != 0;
  }
  return first >= 0xC2 && first <= 0xDF ? 2 : (first & 0xF0) == 0xE0 ? 3 : first >= 0xF0 && first <= 0xF4 ? 4 : 0;
}

size_t even_utf8_character(const char *text) {
  const unsigned char *at = (const unsigned char *)text;
  size_t bytes = expected_bytes(at[0]);
  for (size_t i = 1; i < bytes; i++) {
    if ((at[i] & 0xC0U) != 0x80) {
      return 0;
    }
  }
  bool longer_than_needed = (at[0] == 0xE0 && at[1] < 0xA0) || (at[0] == 0xF0 && at[1] < 0x90);
  bool no_character = (at[0] == 0xED && at[1] > 0x9F) || (at[0] == 0xF4 && at[1] > 0x8F);
  return longer_than_needed || no_character ? 0 : bytes;
}

bool even_utf8_valid(const char *text) {
  for (size_t bytes = 0; *text != '\0'; text += bytes) {
    bytes = even_utf8_character(text);
    if (bytes == 0) {
      return false;
    }
  }
  return true;
}

void even_utf8_trim(char *text) {
  size_t length = strlen(text);
  for (size_t back = 1; back <= 3 && back <= length; back++) {
    size_t expected = expected_bytes((unsigned char)text[length - back]);
    if (expected > back) {
      text[length - back] = '\0';
    }
    if (((unsigned char)text[length - back] & 0xC0U) != 0x80) {
      return;
    }
  }
}

const char *even_utf8_clean(const char *text, char *out, size_t room) {
  size_t used = 0;
  while (*text != '\0') {
    size_t bytes = even_utf8_character(text);
    unsigned char first = (unsigned char)text[0];
    bool control = first < 0x20 || first == 0x7F || (first == 0xC2 && bytes == 2 && (unsigned char)text[1] < 0xA0);
    bool plain = bytes > 0 && !control;
    size_t taken = plain ? bytes : 1;
    if (used + taken + 1 > room) {
      break;
    }
    memcpy(out + used, plain ? text : "?", taken);
    used += taken;
    text += bytes == 0 ? 1 : bytes;
  }
  out[used] = '\0';
  return out;
}
