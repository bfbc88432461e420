/* Batch normalisation over all ranks; see evenstep/norm.h. Each rank's row: its mark, its number, its two arrays. */
#include <evenstep/norm.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/fail.h"
#include "base/params.h"
#include "sync/norm_values.h"

#include <math.h>
#include <string.h>

enum { MARK = 2, HEAD = MARK + 1 };

static void fill_row(const even_norm_values *mine, double *row) {
  double *first = row + HEAD;
  double *second = first + mine->channels;
  memcpy(row, mine->mark, MARK * sizeof *row);
  row[MARK] = mine->number;
  for (size_t c = 0; c < mine->channels; c++) {
    first[c] = mine->first != NULL ? even_norm_at(mine->first, mine->dtype, c) : 0.0;
    second[c] = mine->second != NULL ? even_norm_at(mine->second, mine->dtype, c) : 0.0;
  }
}

/* All ranks' rows, one after the other. */
typedef struct norm_rows {
  double *values; /* this rank's first, then all; NULL until gathered */
  const double *all;
  size_t *bytes; /* of each row */
  size_t width;
  size_t ranks;
} norm_rows;

static void free_rows(norm_rows *rows) {
  even_free(rows->values);
  even_free(rows->bytes);
}

static even_status make_rows(norm_rows *rows, size_t channels) {
  size_t bytes = 0;
  size_t count = 0;
  if (!even_multiply_size(channels, 2, &rows->width) || !even_add_size(rows->width, HEAD, &rows->width) ||
      !even_multiply_size(rows->width, sizeof *rows->values, &bytes) ||
      !even_multiply_size(rows->width, rows->ranks + 1, &count)) {
    return even_fail(EVEN_ERR_ARGUMENT, "batch normalisation: %zu channels are more than a size can hold", channels);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&rows->bytes, rows->ranks));
  for (size_t r = 0; r < rows->ranks; r++) {
    rows->bytes[r] = bytes;
  }
  return EVEN_NEW_ARRAY(&rows->values, count);
}

static even_status gather(even_comm *comm, const even_norm_values *mine, norm_rows *rows) {
  EVEN_TRY(even_norm_check(mine->dtype));
  rows->ranks = (size_t)even_comm_ranks(comm);
  EVEN_TRY(make_rows(rows, mine->channels));
  fill_row(mine, rows->values);
  rows->all = rows->values + rows->width;
  return even_comm_all_gather(comm, rows->values, rows->values + rows->width, rows->bytes, EVEN_U8);
}

/* What each rank is, and whether all are in one call. */
static void read_heads(const norm_rows *rows, even_norm_whole *out) {
  out->alike = true;
  for (size_t r = 0; r < rows->ranks; r++) {
    const double *row = rows->all + r * rows->width;
    out->alike = out->alike && row[0] == rows->all[0] && row[1] == rows->all[1];
    out->numbers[r] = row[MARK];
  }
}

static void weigh(const norm_rows *rows, size_t channels, even_norm_whole *out) {
  memset(out->first, 0, channels * sizeof *out->first);
  memset(out->second, 0, channels * sizeof *out->second);
  for (size_t r = 0; r < rows->ranks; r++) {
    const double *first = rows->all + r * rows->width + HEAD;
    const double *second = first + channels;
    double number = out->numbers[r];
    for (size_t c = 0; c < channels; c++) {
      out->first[c] += number * first[c];
      out->second[c] += number * second[c];
    }
  }
}

static void merge(const norm_rows *rows, size_t channels, even_norm_whole *out) {
  double total = 0.0;
  for (size_t r = 0; r < rows->ranks; r++) {
    total += out->numbers[r];
  }
  total = total > 0.0 ? total : 1.0;
  memset(out->first, 0, channels * sizeof *out->first);
  memset(out->second, 0, channels * sizeof *out->second);
  for (size_t r = 0; r < rows->ranks; r++) {
    const double *means = rows->all + r * rows->width + HEAD;
    for (size_t c = 0; c < channels; c++) {
      out->first[c] += out->numbers[r] * means[c];
    }
  }
  for (size_t c = 0; c < channels; c++) {
    out->first[c] /= total;
  }
  for (size_t r = 0; r < rows->ranks; r++) {
    const double *means = rows->all + r * rows->width + HEAD;
    const double *variances = means + channels;
    for (size_t c = 0; c < channels; c++) {
      double off = means[c] - out->first[c];
      out->second[c] += out->numbers[r] * (variances[c] + off * off);
    }
  }
  for (size_t c = 0; c < channels; c++) {
    out->second[c] /= total;
  }
}

typedef void join_call(const norm_rows *rows, size_t channels, even_norm_whole *out);

static even_status together(even_comm *comm, const even_norm_values *mine, even_norm_whole *out, join_call *join) {
  norm_rows rows = {0};
  even_norm_values own;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_norm_values, &own, mine));
  even_status status = gather(comm, &own, &rows);
  if (status == EVEN_OK) {
    read_heads(&rows, out);
    join(&rows, own.channels, out);
  }
  free_rows(&rows);
  return status;
}

even_status even_norm_statistics(even_comm *comm, const even_norm_values *mine, even_norm_whole *out) {
  return together(comm, mine, out, merge);
}

even_status even_norm_sums(even_comm *comm, const even_norm_values *mine, even_norm_whole *out) {
  return together(comm, mine, out, weigh);
}

even_status even_norm_through(const even_norm_backward *layer, const even_norm_whole *sums, void *slope, void *shift) {
  even_norm_backward own;
  EVEN_TRY(EVEN_TAKE_PARAMS(even_norm_backward, &own, layer));
  layer = &own;
  EVEN_TRY(even_norm_check(layer->dtype));
  for (size_t c = 0; c < layer->channels; c++) {
    double factor = layer->weight != NULL ? even_norm_at(layer->weight, layer->dtype, c) : 1.0;
    double spread = sqrt(even_norm_at(layer->variance, layer->dtype, c) + layer->eps);
    double scale = -factor / (spread * layer->values * layer->part);
    even_norm_put(slope, layer->dtype, c, sums->second[c] * scale);
    even_norm_put(shift, layer->dtype, c, sums->first[c] * scale);
  }
  return EVEN_OK;
}

even_status even_norm_follow(void *running, even_dtype dtype, const double *values, size_t channels, double momentum,
                             double factor) {
  EVEN_TRY(even_norm_check(dtype));
  if (dtype == EVEN_F64) {
    double *kept = running;
    for (size_t c = 0; c < channels; c++) {
      kept[c] = kept[c] * (1.0 - momentum) + momentum * (values[c] * factor);
    }
    return EVEN_OK;
  }
  float *kept = running;
  for (size_t c = 0; c < channels; c++) {
    kept[c] = kept[c] * (float)(1.0 - momentum) + (float)momentum * (float)(values[c] * factor);
  }
  return EVEN_OK;
}
