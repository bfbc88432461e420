/* A recursive descent over RFC 8259 that keeps nothing but its place. */
#include "base/json_check.h"

#include "base/fail.h"
#include "base/utf8.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 512 };

typedef struct check {
  const char *at;
  const char *wrong; /* NULL: nothing yet */
  int depth;
} check;

static bool refuse(check *now, const char *wrong) {
  now->wrong = now->wrong == NULL ? wrong : now->wrong;
  return false;
}

static void skip_blanks(check *now) {
  now->at += strspn(now->at, " \t\r\n");
}

static bool take(check *now, char wanted) {
  skip_blanks(now);
  if (*now->at != wanted) {
    return false;
  }
  now->at++;
  return true;
}

/* Four hex digits after "\u"; -1 where they are not. */
static long code_unit(check *now) {
  char digits[5] = {0};
  if (strspn(now->at, "0123456789abcdefABCDEF") < 4) {
    return -1;
  }
  memcpy(digits, now->at, 4);
  now->at += 4;
  return strtol(digits, NULL, 16);
}

static bool escape(check *now) {
  char kind = *now->at;
  if (kind == '\0' || strchr("\"\\/bfnrtu", kind) == NULL) {
    return refuse(now, "an unknown escape");
  }
  now->at++;
  if (kind != 'u') {
    return true;
  }
  long unit = code_unit(now);
  if (unit <= 0) {
    return refuse(now, unit == 0 ? "a NUL in a string" : "an escape without its four digits");
  }
  if (unit >= 0xd800 && unit <= 0xdbff && now->at[0] == '\\' && now->at[1] == 'u') {
    now->at += 2;
    long second = code_unit(now);
    return second >= 0xdc00 && second <= 0xdfff ? true : refuse(now, "half a surrogate pair");
  }
  return unit >= 0xd800 && unit <= 0xdfff ? refuse(now, "half a surrogate pair") : true;
}

static bool string(check *now) {
  if (!take(now, '"')) {
    return refuse(now, "a string is missing");
  }
  while (*now->at != '"') {
    if ((unsigned char)*now->at < 0x20) {
      return refuse(now, *now->at == '\0' ? "a string without an end" : "a control character in a string");
    }
    if (*now->at++ == '\\' && !escape(now)) {
      return false;
    }
  }
  now->at++;
  return true;
}

static size_t digits(const char *text) {
  return strspn(text, "0123456789");
}

static bool number(check *now) {
  const char *begin = now->at;
  bool whole = true;
  now->at += *now->at == '-';
  size_t count = digits(now->at);
  if (count == 0 || (count > 1 && *now->at == '0')) {
    return refuse(now, "a value is missing");
  }
  now->at += count;
  if (*now->at == '.') {
    whole = false;
    now->at++;
    count = digits(now->at);
    now->at += count;
  }
  if (count > 0 && (*now->at == 'e' || *now->at == 'E')) {
    whole = false;
    now->at++;
    now->at += *now->at == '+' || *now->at == '-';
    count = digits(now->at);
    now->at += count;
  }
  if (count == 0) {
    return refuse(now, "a number without digits");
  }
  errno = 0;
  if (whole ? (void)strtoll(begin, NULL, 10), errno == ERANGE : isinf(strtod(begin, NULL))) {
    return refuse(now, "a number beyond 64 bits");
  }
  return true;
}

static bool word(check *now, const char *text) {
  if (strncmp(now->at, text, strlen(text)) != 0) {
    return refuse(now, "a value is missing");
  }
  now->at += strlen(text);
  return true;
}

static bool value(check *now);

/* The members of an object or the elements of an array, behind its opening bracket. */
static bool members(check *now, bool named, char end) {
  if (take(now, end)) {
    return true;
  }
  if (++now->depth > MOST_DEPTH) {
    return refuse(now, "it is nested too deep");
  }
  do {
    if (named && (!string(now) || !take(now, ':'))) {
      return refuse(now, "a colon is missing");
    }
    if (!value(now)) {
      return false;
    }
  } while (take(now, ','));
  now->depth--;
  return take(now, end) ? true : refuse(now, "a comma or a closing bracket is missing");
}

static bool value(check *now) {
  skip_blanks(now);
  switch (*now->at) {
    case '{':
      now->at++;
      return members(now, true, '}');
    case '[':
      now->at++;
      return members(now, false, ']');
    case '"':
      return string(now);
    case 't':
      return word(now, "true");
    case 'f':
      return word(now, "false");
    case 'n':
      return word(now, "null");
    default:
      return number(now);
  }
}

even_status even_json_check_object(const char *what, const char *text) {
  check now = {text, NULL, 0};
  if (!even_utf8_valid(text)) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s is not valid UTF-8", what);
  }
  skip_blanks(&now);
  if (*now.at != '{') {
    (void)refuse(&now, "no object begins");
  } else if (value(&now)) {
    skip_blanks(&now);
    if (*now.at != '\0') {
      (void)refuse(&now, "more text after its end");
    }
  }
  if (now.wrong != NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "%s is not a JSON object: byte %zu: %s", what, (size_t)(now.at - text),
                     now.wrong);
  }
  return EVEN_OK;
}
