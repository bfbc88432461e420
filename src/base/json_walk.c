/* Steps over checked JSON: what stands between brackets is known to be well formed. */
#include "base/json_walk.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static const char *past_blanks(const char *at) {
  return at + strspn(at, " \t\r\n");
}

/* Past a string's closing quote; `at` is on the opening one. */
static const char *past_string(const char *at) {
  for (at++; *at != '"'; at++) {
    at += *at == '\\';
  }
  return at + 1;
}

static const char *past_value(const char *at) {
  int depth = 0;
  do {
    at = past_blanks(at);
    if (*at == '"') {
      at = past_string(at);
    } else if (*at == '{' || *at == '[') {
      depth++;
      at++;
    } else if (*at == '}' || *at == ']') {
      depth--;
      at++;
    } else if (*at == ',' || *at == ':') {
      at++;
    } else {
      at += strcspn(at, " \t\r\n,:]}");
    }
  } while (depth > 0);
  return at;
}

even_json_walk even_json_walk_begin(const char *text) {
  return (even_json_walk){past_blanks(text)};
}

bool even_json_walk_enter(even_json_walk value, char bracket, even_json_walk *inside) {
  if (*value.at != bracket) {
    return false;
  }
  inside->at = past_blanks(value.at + 1);
  return true;
}

/* Past the comma before the next one, if there is a next one. */
static bool reach_next(even_json_walk *inside) {
  inside->at = past_blanks(inside->at);
  if (*inside->at == ',') {
    inside->at = past_blanks(inside->at + 1);
  }
  return *inside->at != '}' && *inside->at != ']';
}

bool even_json_walk_element(even_json_walk *inside, even_json_walk *value) {
  if (!reach_next(inside)) {
    return false;
  }
  value->at = inside->at;
  inside->at = past_value(inside->at);
  return true;
}

bool even_json_walk_member(even_json_walk *inside, char *name, size_t room, even_json_walk *value) {
  if (!reach_next(inside)) {
    return false;
  }
  if (!even_json_walk_string(*inside, name, room)) {
    name[0] = '\0';
  }
  inside->at = past_blanks(past_string(inside->at));
  value->at = past_blanks(inside->at + 1); /* behind the colon */
  inside->at = past_value(value->at);
  return true;
}

static uint32_t hex_of(const char *at) {
  char digits[5] = {at[0], at[1], at[2], at[3], '\0'};
  return (uint32_t)strtoul(digits, NULL, 16);
}

/* A character as UTF-8 (RFC 3629); how many bytes it takes. */
static size_t encode(uint32_t code, char *out) {
  if (code < 0x80) {
    out[0] = (char)code;
    return 1;
  }
  size_t bytes = code < 0x800 ? 2 : (code < 0x10000 ? 3 : 4);
  for (size_t i = bytes - 1; i > 0; i--, code >>= 6) {
    out[i] = (char)(0x80 | (code & 0x3f));
  }
  out[0] = (char)((0xf0 << (4 - bytes) & 0xff) | code);
  return bytes;
}

/* What an escape stands for; moves past it. */
static size_t unescape(const char **at, char *out) {
  static const char names[] = "bfnrt";
  static const char values[] = "\b\f\n\r\t";
  char kind = (*at)[1];
  const char *named = strchr(names, kind);
  *at += 2;
  if (kind != 'u') {
    out[0] = named == NULL ? kind : values[named - names];
    return 1;
  }
  uint32_t code = hex_of(*at);
  *at += 4;
  if (code >= 0xd800 && code <= 0xdbff) { /* the first half of a pair: "\u" and the second follow */
    code = 0x10000 + ((code - 0xd800) << 10) + (hex_of(*at + 2) - 0xdc00);
    *at += 6;
  }
  return encode(code, out);
}

bool even_json_walk_string(even_json_walk value, char *out, size_t room) {
  size_t length = 0;
  const char *at = value.at;
  if (*at++ != '"') {
    return false;
  }
  while (*at != '"') {
    char character[4];
    size_t bytes = 1;
    if (*at == '\\') {
      bytes = unescape(&at, character);
    } else {
      character[0] = *at++;
    }
    if (length + bytes >= room) {
      return false;
    }
    memcpy(out + length, character, bytes);
    length += bytes;
  }
  out[length] = '\0';
  return true;
}

bool even_json_walk_number(even_json_walk value, double *out) {
  if (*value.at != '-' && (*value.at < '0' || *value.at > '9')) {
    return false;
  }
  *out = strtod(value.at, NULL);
  return true;
}
