/* Keeps run.db small: when it has many rows of steps, the oldest of them become rows of several steps each. */
#ifndef EVEN_MONITOR_THIN_H
#define EVEN_MONITOR_THIN_H

#include <sqlite3.h>
#include <stdint.h>

enum {
  EVEN_THIN_STEP_ROWS = 1 << 15, /* kept where nobody says otherwise, one a rank and step: half a second to merge */
  EVEN_THIN_ROWS_A_RANK = 256,   /* at least */
  EVEN_THIN_HEAD_STEPS = 64      /* the first of an attempt, kept as they are: a report leaves some of them out */
};

/* Before it lie the older attempts, and of its attempt the rows up to began_ns (steps that a script made before
 * es.load_checkpoint took it back) and of those up to ended_ns the ones of earlier steps. */
typedef struct even_thin_place {
  int64_t attempt;
  int64_t step;
  int64_t began_ns;
  int64_t ended_ns;
} even_thin_place;

typedef struct even_thinning {
  int64_t most_rows;      /* of steps; INT64_MAX: all are kept */
  int64_t rows;           /* there now */
  int64_t next;           /* so many are too many; 0: most_rows */
  int64_t width;          /* steps that a merged row covers; 0: nothing was merged yet */
  even_thin_place merged; /* what is before it has that width */
} even_thinning;

/* To be called in an open transaction. Where there are more rows than most_rows, the older half of the steps is
 * merged, with their spans, until an eighth of most_rows is free or nothing more can be: groups of `width` steps
 * (a power of two, which grows), the same for all ranks. Steps that were made again within an attempt keep groups of
 * their own; their spans are summed with those of the first time. A merged row has the last step of its group and the
 * sums of its numbers, of loss and predicted_seconds the means; column "steps" counts. meta "merged_rows" is the
 * highest rowid of steps that was merged, "thinning" what even_thin_go_on takes. Returns SQLite's code. */
int even_thin(sqlite3 *connection, even_thinning *thinning);
/* Of a database that another writer left: most_rows stays, the rest is as it was there. Returns SQLite's code. */
int even_thin_go_on(sqlite3 *connection, even_thinning *thinning);

#endif
