/* --notice-from, word by word. */
#include "orchestrator/notice_place.h"

#include "base/fail.h"
#include "os/socket.h"

#include <stdio.h>
#include <string.h>

static const char METADATA[] = "169.254.169.254"; /* of all three clouds */
enum { HTTP_PORT = 80 };

static const struct {
  const char *name;
  even_notice_service service;
  bool rebalance;
} clouds[] = {{"auto", EVEN_NOTICE_AUTO, false},
              {"aws+rebalance", EVEN_NOTICE_AWS, true},
              {"aws", EVEN_NOTICE_AWS, false},
              {"gcp", EVEN_NOTICE_GCP, false},
              {"azure", EVEN_NOTICE_AZURE, false}};

static even_status no_place(const char *text, const char *fix) {
  (void)even_fail(EVEN_ERR_USAGE, "nobody announces the end of a machine at \"%.100s\"", text);
  return even_error_fix("%s", fix);
}

static const char FORMS[] = "give aws, gcp, azure, auto, http://ADDRESS[:PORT]/PATH, exec:COMMAND or off";

/* Five digits at most; false: it is no port. */
static bool read_port(const char *text, size_t length, int *port) {
  *port = 0;
  for (size_t i = 0; i < length; i++) {
    if (i == 5 || text[i] < '0' || text[i] > '9') {
      return false;
    }
    *port = *port * 10 + (text[i] - '0');
  }
  return *port >= 1 && *port <= 65535;
}

/* "127.0.0.1:8000", as long as `length`. */
static bool read_address(const char *text, size_t length, even_notice_place *out) {
  char host[EVEN_NOTICE_ADDRESS];
  const char *colon = memchr(text, ':', length);
  size_t host_length = colon == NULL ? length : (size_t)(colon - text);
  out->port = HTTP_PORT;
  if (colon != NULL && !read_port(colon + 1, length - host_length - 1, &out->port)) {
    return false;
  }
  if (host_length == 0 || host_length >= sizeof host) {
    return false;
  }
  memcpy(host, text, host_length);
  host[host_length] = '\0';
  (void)snprintf(out->address, sizeof out->address, "%s", strcmp(host, "localhost") == 0 ? "127.0.0.1" : host);
  return even_socket_is_address(out->address);
}

/* What a path or a command may be: it goes into a line of a request, or to a shell. */
static bool keep(const char *text, bool path, even_notice_place *out) {
  size_t length = strlen(text);
  bool fits = length > 0 && length < sizeof out->text;
  for (size_t i = 0; fits && path && i < length; i++) {
    fits = text[i] > ' ' && text[i] <= '~';
  }
  if (fits) {
    memcpy(out->text, text, length + 1);
  }
  return fits;
}

static even_status read_url(const char *text, const char *rest, even_notice_place *out) {
  size_t authority = strcspn(rest, "/?#");
  out->service = EVEN_NOTICE_URL;
  if (!read_address(rest, authority, out)) {
    return no_place(text, "give an IPv4 address, and a port: http://127.0.0.1:8000/notice (names are not looked up)");
  }
  if (rest[authority] == '/' ? !keep(rest + authority, true, out) : rest[authority] != '\0') {
    return no_place(text, "give a path of letters, digits and signs behind the address: http://127.0.0.1:8000/notice");
  }
  if (rest[authority] == '\0') {
    (void)keep("/", true, out);
  }
  return EVEN_OK;
}

static even_status read_cloud(const char *text, even_notice_place *out) {
  size_t length = strcspn(text, "=");
  for (size_t i = 0; i < sizeof clouds / sizeof clouds[0]; i++) {
    if (strlen(clouds[i].name) != length || strncmp(text, clouds[i].name, length) != 0) {
      continue;
    }
    out->service = clouds[i].service;
    out->rebalance = clouds[i].rebalance;
    out->port = HTTP_PORT;
    memcpy(out->address, METADATA, sizeof METADATA);
    const char *address = text + length + 1;
    return text[length] == '\0' || read_address(address, strlen(address), out)
               ? EVEN_OK
               : no_place(text, "give an IPv4 address, and a port, behind the =: aws=127.0.0.1:1338");
  }
  return no_place(text, FORMS);
}

even_status even_notice_place_read(const char *text, even_notice_place *out) {
  *out = (even_notice_place){.service = EVEN_NOTICE_OFF};
  if (strcmp(text, "off") == 0) {
    return EVEN_OK;
  }
  if (strncmp(text, "exec:", 5) == 0) {
    out->service = EVEN_NOTICE_EXEC;
    return keep(text + 5, false, out) ? EVEN_OK : no_place(text, "give a command behind exec:, of at most 1023 bytes");
  }
  if (strncmp(text, "http://", 7) == 0) {
    return read_url(text, text + 7, out);
  }
  if (strncmp(text, "https://", 8) == 0) {
    return no_place(text, "only plain http:// is spoken; for https use a command: exec:curl -fsS https://…");
  }
  return read_cloud(text, out);
}

const char *even_notice_place_name(const even_notice_place *place, char room[64]) {
  switch (place->service) {
    case EVEN_NOTICE_AWS:
      return place->rebalance ? "aws+rebalance" : "aws";
    case EVEN_NOTICE_GCP:
      return "gcp";
    case EVEN_NOTICE_AZURE:
      return "azure";
    case EVEN_NOTICE_URL:
      (void)snprintf(room, 64, "http://%s:%d", place->address, place->port);
      return room;
    case EVEN_NOTICE_EXEC:
      return "exec";
    case EVEN_NOTICE_AUTO:
    case EVEN_NOTICE_OFF:
      break;
  }
  return place->service == EVEN_NOTICE_AUTO ? "auto" : "off";
}
