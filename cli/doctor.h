/* What `evenstep doctor` finds: a list of parts, each here, lacking something, or missing. */
#ifndef EVEN_CLI_DOCTOR_H
#define EVEN_CLI_DOCTOR_H

#include "base/text.h"

typedef enum even_doctor_state {
  EVEN_DOCTOR_OK,
  EVEN_DOCTOR_NOTE,   /* training works; something is slower, or is not there */
  EVEN_DOCTOR_MISSING /* training cannot work without it */
} even_doctor_state;

typedef struct even_doctor_check {
  const char *name;
  even_doctor_state state;
  char *found;      /* what there is */
  const char *cost; /* what its lack costs; NULL for an OK */
  const char *fix;  /* how to get it; may be NULL */
} even_doctor_check;

typedef struct even_doctor {
  even_doctor_check *items;
  size_t count;
  even_status status; /* of the first addition that failed */
} even_doctor;

/* Adds a part; `cost` and `fix` are dropped for an OK. All texts but `found` must live on. */
void even_doctor_add(even_doctor *doctor, const char *name, even_doctor_state state, const char *cost, const char *fix,
                     const char *found, ...) EVEN_PRINTF(6, 7);

/* The interpreter, torch and this package. `wish` as for even_cli_python. */
void even_doctor_python(even_doctor *doctor, const char *wish);
/* The kernel, CPUs, memory and disk. */
void even_doctor_host(even_doctor *doctor);
/* Libraries opened at run time, and those that this program was built with. */
void even_doctor_libraries(even_doctor *doctor);

#endif
