/* Sockets by their numbers: what the process has open, looked up in its network's table. */
#include "os/listening.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"
#include "os/folder.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LISTENS = 0x0a, LARGEST_TABLE = 1 << 22, ADDRESS_DIGITS = 8, LONGEST_ADDRESS = 32 };

/* The n-th word of a line, from 0; NULL: it has fewer. */
static const char *word_of(const char *line, int n) {
  for (;; n--) {
    line += strspn(line, " ");
    if (*line == '\0' || *line == '\n') {
      return NULL;
    }
    if (n == 0) {
      return line;
    }
    line += strcspn(line, " \n");
  }
}

/* "0100007F:1F90": the address in the order of the host's bytes. Of IPv6 only "any address" (::) is known. */
static bool take_address(const char *word, even_listening *out) {
  size_t digits = strspn(word, "0123456789abcdefABCDEF");
  if (word[digits] != ':' || (digits != ADDRESS_DIGITS && digits != LONGEST_ADDRESS)) {
    return false;
  }
  bool any = strspn(word, "0") == digits;
  if (digits == LONGEST_ADDRESS && !any) {
    return false;
  }
  uint32_t address = (uint32_t)strtoul(word, NULL, 16);
  unsigned char bytes[4];
  memcpy(bytes, &address, sizeof bytes);
  if (any) {
    (void)snprintf(out->address, sizeof out->address, "127.0.0.1");
  } else {
    (void)snprintf(out->address, sizeof out->address, "%d.%d.%d.%d", bytes[0], bytes[1], bytes[2], bytes[3]);
  }
  out->port = (int)strtol(word + digits + 1, NULL, 16);
  return out->port > 0 && out->port <= UINT16_MAX;
}

static bool has(const uint64_t *sockets, size_t count, uint64_t socket) {
  for (size_t i = 0; i < count; i++) {
    if (sockets[i] == socket) {
      return true;
    }
  }
  return false;
}

size_t even_listening_parse(const char *text, const uint64_t *sockets, size_t socket_count, even_listening *out,
                            size_t room) {
  enum { ADDRESS = 1, STATE = 3, SOCKET = 9 };
  size_t count = 0;
  for (const char *line = text; *line != '\0' && count < room;) {
    const char *state = word_of(line, STATE);
    const char *number = word_of(line, SOCKET);
    if (state != NULL && number != NULL && strtol(state, NULL, 16) == LISTENS &&
        has(sockets, socket_count, strtoull(number, NULL, 10)) && take_address(word_of(line, ADDRESS), &out[count])) {
      count++;
    }
    line += strcspn(line, "\n");
    line += *line == '\n' ? 1 : 0;
  }
  return count;
}

/* The numbers of its sockets; free *out. */
static even_status find_sockets(pid_t pid, uint64_t **out, size_t *count) {
  static const char begins[] = "socket:[";
  char path[64];
  char link[64];
  even_names names = {NULL, 0};
  *out = NULL;
  *count = 0;
  (void)snprintf(path, sizeof path, "/proc/%ld/fd", (long)pid);
  even_status status = even_folder_names(path, &names);
  if (status == EVEN_OK) {
    status = EVEN_NEW_ARRAY(out, names.count + 1);
  }
  for (size_t i = 0; status == EVEN_OK && i < names.count; i++) {
    (void)snprintf(path, sizeof path, "/proc/%ld/fd/%.16s", (long)pid, names.items[i]);
    ssize_t length = even_os.readlink(path, link, sizeof link - 1);
    link[length < 0 ? 0 : length] = '\0';
    if (strncmp(link, begins, sizeof begins - 1) == 0) {
      (*out)[(*count)++] = strtoull(link + sizeof begins - 1, NULL, 10);
    }
  }
  even_names_free(&names);
  return status;
}

even_status even_listening_of(pid_t pid, even_listening *out, size_t room, size_t *count) {
  static const char *const tables[] = {"tcp", "tcp6"};
  uint64_t *sockets = NULL;
  size_t socket_count = 0;
  *count = 0;
  even_status status = find_sockets(pid, &sockets, &socket_count);
  for (size_t i = 0; i < 2 && status == EVEN_OK; i++) {
    char path[64];
    even_text text = EVEN_TEXT_EMPTY;
    (void)snprintf(path, sizeof path, "/proc/%ld/net/%s", (long)pid, tables[i]);
    status = even_file_read(path, LARGEST_TABLE, &text);
    if (status == EVEN_OK) {
      *count += even_listening_parse(even_text_string(&text), sockets, socket_count, out + *count, room - *count);
    }
    even_text_free(&text);
  }
  even_free(sockets);
  if (status != EVEN_OK && status != EVEN_ERR_MEMORY) {
    even_error_clear(); /* it has ended, or is not ours */
    status = EVEN_OK;
  }
  return status;
}
