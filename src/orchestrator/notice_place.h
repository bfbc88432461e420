/* Who announces the end of a machine, as the user names it (--notice-from): a cloud's metadata service, an address of
 * HTTP, or a command. Pure. */
#ifndef EVEN_ORCHESTRATOR_NOTICE_PLACE_H
#define EVEN_ORCHESTRATOR_NOTICE_PLACE_H

#include <evenstep/status.h>
#include <stdbool.h>

typedef enum even_notice_service {
  EVEN_NOTICE_OFF,
  EVEN_NOTICE_AUTO, /* whichever of the three clouds' answers */
  EVEN_NOTICE_AWS,
  EVEN_NOTICE_GCP,
  EVEN_NOTICE_AZURE,
  EVEN_NOTICE_URL,
  EVEN_NOTICE_EXEC
} even_notice_service;

enum { EVEN_NOTICE_ADDRESS = 16, EVEN_NOTICE_TEXT = 1024 };

typedef struct even_notice_place {
  even_notice_service service;
  bool rebalance; /* of AWS: its recommendations count, too */
  char address[EVEN_NOTICE_ADDRESS];
  int port;
  char text[EVEN_NOTICE_TEXT]; /* the path of a URL with its query, or the command */
} even_notice_place;

/* "off", "auto", "aws", "aws+rebalance", "gcp", "azure", each cloud's also with an IPv4 address (and port) where
 * another one than 169.254.169.254 plays its service ("aws=127.0.0.1:1338"); "http://127.0.0.1:8000/path";
 * "exec:COMMAND". Names of hosts are none: looking them up may take long. EVEN_ERR_USAGE with a fix. */
even_status even_notice_place_read(const char *text, even_notice_place *out) EVEN_MUST_USE;
/* "aws", "http://127.0.0.1:8000", "exec": a static string but for a URL, which is written to `room`. */
const char *even_notice_place_name(const even_notice_place *place, char room[64]);

#endif
