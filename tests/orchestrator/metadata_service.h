/* A metadata service that a test plays in its own thread, between two turns of the loop of whoever asks it. */
#ifndef EVEN_TESTS_ORCHESTRATOR_METADATA_SERVICE_H
#define EVEN_TESTS_ORCHESTRATOR_METADATA_SERVICE_H

#include <stdbool.h>
#include <stddef.h>

/* How it answers. */
typedef enum metadata_manner {
  MANNER_WELL,
  MANNER_BYTEWISE, /* well, a byte a turn */
  MANNER_CLOSES,   /* without a word */
  MANNER_HALF,     /* half of the answer, and closes */
  MANNER_STANDS,   /* half of the answer, and no more */
  MANNER_SILENT,
  MANNER_GARBAGE,
  MANNER_LONG,   /* says that it sends 1 GiB */
  MANNER_FLOODS, /* a body without end */
  MANNER_COUNT
} metadata_manner;

enum { METADATA_LINES = 4, METADATA_CONNECTIONS = 8 };

typedef struct metadata_line {
  const char *beginning; /* of the request: "GET /path" */
  const char *header;    /* that it must have, "" for none: else the answer is 400 */
  int status;
  const char *headers; /* of the answer, each with its end of line; NULL: none */
  char body[1024];
} metadata_line;

typedef struct metadata_service {
  int listener;
  int port;
  metadata_manner manner;
  metadata_line lines[METADATA_LINES]; /* what none of them is for is not found */
  struct {
    int fd;
    char request[2048];
    size_t bytes;
    char answer[4096];
    size_t length;
    size_t sent;
    bool answers;
    bool headed; /* of a flood */
  } connections[METADATA_CONNECTIONS];
  char asked[8192]; /* the first lines of all, each with a | */
} metadata_service;

/* Calls the kernel by itself: faults on purpose do not meet it. */
void metadata_service_open(metadata_service *out);
void metadata_service_close(metadata_service *service);
void metadata_service_turn(metadata_service *service);
/* How often a request that begins so has come. */
int metadata_service_count(const metadata_service *service, const char *beginning);

#endif
